"""A private certificate authority, the server's certificate, and the keys of sites.

The authority's key signs server certificates and is needed for nothing else: it may have a passphrase, and may lie on
another machine than the server's.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedmtl.errors import FedmtlError
from fedmtl.federation.faults import is_safe_name
from fedmtl.runs.folder import make_private_folder, write_atomic

CA, CA_KEY, CERTIFICATE, KEY = "ca.crt", "ca.key", "server.crt", "server.key"
# Sites hold a copy of the authority's certificate, which is why it lives longer than what it signs.
AUTHORITY_DAYS, SERVER_DAYS = 5 * 365, 397
WARN_DAYS = 30
CURVE = ec.SECP384R1
PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class ServerCertificate:
    """The two files that a server shows itself with."""

    certificate: Path
    key: Path

    def stamp(self) -> tuple[int, int] | None:
        """Changes when the files do; None while they cannot be seen."""
        try:
            return self.certificate.stat().st_mtime_ns, self.key.stat().st_mtime_ns
        except OSError:
            return None

    def warning(self) -> str | None:
        """One line when the certificate ends soon or has ended, or None."""
        end = end_of(self.certificate)
        return expiry_warning(end, f"renew it with `fedmtl certs renew {self.certificate.parent}`")


def make_authority(
    folder: Path, hosts: Sequence[str], passphrase: bytes | None = None, ca_folder: Path | None = None
) -> list[Path]:
    """Make an authority and a server certificate for these names and addresses; files that exist are never replaced.

    The authority's key goes to `ca_folder`, where one is given.
    """
    alternatives = [_alternative(host) for host in hosts]
    ca_key = (ca_folder or folder) / CA_KEY
    paths = [folder / CA, ca_key, folder / CERTIFICATE, folder / KEY]
    for path in paths:
        if path.exists():
            raise FedmtlError(f"{path}: is there already; name another folder, or remove it")
    for each in (folder, ca_key.parent):
        make_private_folder(each)
    authority = ec.generate_private_key(CURVE())
    issuer = _name("fedmtl authority")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    key_identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    root = (
        _certificate(issuer, authority, issuer, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(key_identifier, critical=False)
    )
    _write(folder / CA, root.sign(authority, hashes.SHA384()).public_bytes(PEM))
    _write_private(ca_key, authority, passphrase)
    _issue(folder, alternatives, authority, issuer)
    return paths


def renew(
    folder: Path, hosts: Sequence[str], passphrase: bytes | None = None, ca_folder: Path | None = None
) -> list[str]:
    """Make a new server certificate and key, signed by the same authority; sites need nothing new.

    Without `hosts` it is for the names and addresses of the old one. `ca_folder` is where the authority's key lies, if
    somewhere else. Returns what it is for.
    """
    ca_path, key_path = folder / CA, (ca_folder or folder) / CA_KEY
    root, key = _read_certificate(ca_path), _read_key(key_path, passphrase)
    if root.public_key() != key.public_key():
        raise FedmtlError(f"{key_path}: is not the key of {ca_path}; give the --ca-dir in which it lies")
    if root.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise FedmtlError(f"{ca_path}: ended on {_day(root)}; make a new one with `fedmtl certs init`, for sites too")
    alternatives = [_alternative(host) for host in hosts] or _alternatives(_read_certificate(folder / CERTIFICATE))
    _issue(folder, alternatives, key, root.subject, root.not_valid_after_utc)
    return [str(each.value) for each in alternatives]


def end_of(certificate: Path) -> datetime.datetime:
    return _read_certificate(certificate).not_valid_after_utc


def mismatch(folder: Path) -> str | None:
    """Why a server's certificate, its key and the authority's certificate do not belong together; None if they do."""
    try:
        certificate, root = _read_certificate(folder / CERTIFICATE), _read_certificate(folder / CA)
        key = _read_key(folder / KEY, None)
    except FedmtlError as error:
        return str(error)
    if certificate.public_key() != key.public_key():
        return f"{folder / KEY} is not its key"
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        return f"it is not signed by {folder / CA}, which sites trust"
    return None


def expiry_warning(end: datetime.datetime, remedy: str) -> str | None:
    left = (end - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400
    if left > WARN_DAYS:
        return None
    when = "has ended" if left < 0 else f"ends in {max(0, int(left))} days"
    return f"the server's certificate {when} ({end:%Y-%m-%d}); {remedy}"


def check_name(name: str) -> str:
    if not is_safe_name(name):
        raise FedmtlError(
            f"{name!r:.80}: is no name for a site; use at most 64 letters from a to z, digits, `.`, `_` and `-`,"
            " and begin with a letter or a digit"
        )
    return name


def make_node_key(name: str, folder: Path) -> tuple[Path, Path]:
    """Make a site's key and the public half, which is what the server's keeper is sent."""
    private, public = folder / f"{check_name(name)}.key", folder / f"{name}.pub"
    for path in (private, public):
        if path.exists():
            raise FedmtlError(f"{path}: is there already; name another site or folder, or remove it")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(CURVE())
    _write_private(private, key)
    _write(public, _public_pem(key.public_key()))
    return private, public


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a site's private key."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise FedmtlError(f"{path}: cannot be read ({error.strerror}); make it with `fedmtl certs node`") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise FedmtlError(f"{path}: is no private key; make one with `fedmtl certs node`") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVE):
        raise FedmtlError(f"{path}: is no key on {CURVE.name}; make one with `fedmtl certs node`")
    return key


def loopback_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """The key of a site that was given none: made once per folder, so that a site that is restarted is the same one."""
    path = folder / "loopback.key"
    try:
        return read_private_key(path)
    except FedmtlError:
        path.unlink(missing_ok=True)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(CURVE())
    _write_private(path, key)
    return key


def check_public_key(content: bytes, name: str) -> str:
    """Return the public key in its one written form; a private key is refused."""
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedmtlError(
            f"{name}: what was given is no public key; give the NAME.pub of `fedmtl certs node`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVE):
        raise FedmtlError(f"{name}: its key is not on {CURVE.name}; make one with `fedmtl certs node`")
    return _public_pem(key).decode()


def fingerprint(pem: str) -> str:
    """What two people compare on the telephone: the beginning of the hash of a public key."""
    key = serialization.load_pem_public_key(pem.encode())
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return digest.finalize().hex()[:16]


def _issue(
    folder: Path,
    alternatives: Sequence[x509.GeneralName],
    authority: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    latest: datetime.datetime | None = None,
) -> None:
    """Write a new server certificate and its key."""
    server = ec.generate_private_key(CURVE())
    leaf = (
        _certificate(_name("fedmtl server"), server, issuer, SERVER_DAYS, latest)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    signed = leaf.sign(authority, hashes.SHA384()).public_bytes(PEM)
    _write_private(folder / KEY, server, is_new=False)
    _write(folder / CERTIFICATE, signed)


def _public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    days: int,
    latest: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(end if latest is None else min(end, latest))
    )


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise FedmtlError(f"{path}: cannot be read ({error.strerror}); make it with `fedmtl certs init`") from error
    except ValueError as error:
        raise FedmtlError(f"{path}: is no certificate; make one with `fedmtl certs init`") from error


def _read_key(path: Path, passphrase: bytes | None) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), passphrase)
    except OSError as error:
        raise FedmtlError(f"{path}: cannot be read ({error.strerror}); give the --ca-dir in which it lies") from error
    except TypeError as error:
        wrong = "has no passphrase; leave it out" if passphrase else "has a passphrase; give --passphrase-file"
        raise FedmtlError(f"{path}: {wrong}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise FedmtlError(f"{path}: is no private key, or its passphrase is another one") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedmtlError(f"{path}: is no key of `fedmtl certs init`")
    return key


def _alternatives(certificate: x509.Certificate) -> list[x509.GeneralName]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(found.value)


def _day(certificate: x509.Certificate) -> str:
    return f"{certificate.not_valid_after_utc:%Y-%m-%d}"


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise FedmtlError(f"--host: {host!r:.80} is no name or address") from error


def _write(path: Path, content: bytes) -> None:
    write_atomic(path, content)


def _write_private(
    path: Path, key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None, *, is_new: bool = True
) -> None:
    """Write a key that only its owner may read; a new one never replaces another."""
    hidden = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    pem = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, hidden)
    written = path if is_new else path.with_name(f".{path.name}.{os.getpid()}.new")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
