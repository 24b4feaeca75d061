"""`veomni train job.yaml`: trains a language model with the kernels that the job names."""
