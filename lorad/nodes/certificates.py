"""The keys of a pool and its agents, who each know the other's certificate for one life of the pool."""

import asyncio
import datetime
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lorad.errors import NotAllowed
from lorad.files import write_whole

# machines whose clocks differ agree on these
_FROM, _UNTIL = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 2100))


class Credentials:
    """A fresh key and the certificate of it. The key is in memory, and for a moment in `directory`, 0600."""

    def __init__(self, name: str, directory: Path) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_FROM)
            .not_valid_after(_UNTIL)
            .sign(key, hashes.SHA256())
        )
        self.pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        self._key = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self._directory = directory

    def context(self, peer: str, *, is_server: bool = False) -> ssl.SSLContext:
        """Make the context of a caller, or of a server, whose other end has the certificate `peer`, PEM."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=peer)
        own = self._directory / "identity.pem"
        write_whole(own, self._key + self.pem.encode(), durable=False)
        try:
            context.load_cert_chain(own)
        finally:
            own.unlink()
        return context


def check_peer(writer: asyncio.StreamWriter, peer: str) -> None:
    """Raise NotAllowed unless the other end has exactly this certificate."""
    if not is_peer(writer, peer):
        raise NotAllowed("another certificate than the one that is known")


def is_peer(writer: asyncio.StreamWriter, *peers: str) -> bool:
    """Return whether the other end has one of these certificates."""
    certificate = writer.get_extra_info("ssl_object").getpeercert(True)
    return certificate in [ssl.PEM_cert_to_DER_cert(peer) for peer in peers]
