"""What plugins and modeling code write down: kernels, ops, hooks, devices, requirements, slots. Without torch."""
