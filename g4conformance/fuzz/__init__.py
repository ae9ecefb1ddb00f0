"""A differential fuzz over random legal configs and cases: the shipped runtime must conform on all of them."""
