"""The judge of softmax attention: problems, oracles, the numerical contract, measures."""
