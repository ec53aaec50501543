"""One base model kept warm: hosts a trainer and an engine, and the socket that drivers call."""
