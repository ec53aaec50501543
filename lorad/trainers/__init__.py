"""The services that compute log-probabilities, gradients and optimizer steps for adapters."""
