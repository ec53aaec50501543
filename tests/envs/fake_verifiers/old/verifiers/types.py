"""The configuration of a client."""

from dataclasses import dataclass


@dataclass
class ClientConfig:
    client_type: str
    api_key_var: str
    api_base_url: str
    max_retries: int
