"""The forwards that bound modules get, and what lives in them. Nothing here finds or proves."""
