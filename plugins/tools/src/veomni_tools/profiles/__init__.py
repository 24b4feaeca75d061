"""Profiles: what `veomni tune` measured of a model on this machine, and what `auto` takes by them."""
