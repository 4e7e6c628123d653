"""Search spaces, hunts, the campaign engine and the corpus of worst cases (`python -m fuzz`)."""
