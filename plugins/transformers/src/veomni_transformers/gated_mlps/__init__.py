"""swiglu_mlp: modules that compute ``down(act(gate(x)) * up(x))``."""
