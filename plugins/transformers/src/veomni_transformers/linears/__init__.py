"""How the matrix products of linear layers, heads and routers are found and proven."""
