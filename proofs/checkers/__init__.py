"""Tools outside Python that check a lemma's formal counterpart: Coq for `.v` files, Gappa for `.g` files."""
