"""Decides which kernel runs at which site, and why. Changes nothing."""
