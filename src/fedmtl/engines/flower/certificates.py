"""A certificate authority of one's own, the server's certificate, and the keys of sites."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedmtl.errors import FedmtlError

CA, CA_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "server.crt", "server.key"
DAYS = 3650
# What Flower's node authentication uses.
CURVE = ec.SECP384R1


def make_authority(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """A new authority and a server certificate for these names and addresses; files that exist are never replaced."""
    paths = [folder / name for name in (CA, CA_KEY, CERTIFICATE, KEY)]
    for path in paths:
        if path.exists():
            raise FedmtlError(f"{path}: is there already; name another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = ec.generate_private_key(CURVE()), ec.generate_private_key(CURVE())
    issuer = _name("fedmtl authority")
    root = _certificate(issuer, authority, issuer, authority).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    own = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = root.add_extension(usage, critical=True).add_extension(own, critical=False)
    leaf = (
        _certificate(_name("fedmtl server"), server, issuer, authority)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    pem = serialization.Encoding.PEM
    _write(folder / CA, root.sign(authority, hashes.SHA384()).public_bytes(pem))
    _write_private(folder / CA_KEY, authority)
    _write(folder / CERTIFICATE, leaf.sign(authority, hashes.SHA384()).public_bytes(pem))
    _write_private(folder / KEY, server)
    return paths


def make_node_key(name: str, folder: Path) -> tuple[Path, Path]:
    """A site's key and the public half, which is what the server's keeper is sent."""
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    for path in (private, public):
        if path.exists():
            raise FedmtlError(f"{path}: is there already; name another site or folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(CURVE())
    _write_private(private, key)
    _write(public, _public_pem(key.public_key()))
    return private, public


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise FedmtlError(f"{path}: cannot be read ({error.strerror}); make it with `fedmtl certs node`") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FedmtlError(f"{path}: is no private key; make one with `fedmtl certs node`") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVE):
        raise FedmtlError(f"{path}: is no key on {CURVE.name}; make one with `fedmtl certs node`")
    return key


def check_public_key(content: bytes, name: str) -> str:
    """The key in the one way it is written; a private key in its place is refused."""
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedmtlError(
            f"{name}: what was given is no public key; give the NAME.pub of `fedmtl certs node`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVE):
        raise FedmtlError(f"{name}: its key is not on {CURVE.name}; make one with `fedmtl certs node`")
    return _public_pem(key).decode()


def _public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, issuer: x509.Name, authority: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
