"""Changes to what transformers, accelerate or a trainer has put on instances of modules, and to children of modules."""
