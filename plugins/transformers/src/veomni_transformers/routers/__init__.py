"""Routers of experts: what they compute, and replaying what they chose."""
