"""A stand-in for verifiers 0.4, in what the adapter asks for; the root has nothing but `verifiers.v1`."""
