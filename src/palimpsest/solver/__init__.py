"""How an objective is minimised: two phases over an explicit state, from random candidates to a result."""
