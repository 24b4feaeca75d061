"""How ops are found and proven in Hugging Face models, and how bound models are built, packed and divided."""
