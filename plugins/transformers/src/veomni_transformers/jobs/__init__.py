"""A job's section ``model``: what it says, and the model that it builds."""
