"""How code is read, run on small inputs and compared with a variant's reference; what every op's proof shares."""
