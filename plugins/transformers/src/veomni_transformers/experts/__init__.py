"""moe_experts: modules that hold all experts' weights."""
