"""Training bias: a private language model shows what public training data lacks."""
