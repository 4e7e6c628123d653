"""The metric audit: which acceptance rule lets which known-wrong kernel pass, and which right kernel it rejects."""
