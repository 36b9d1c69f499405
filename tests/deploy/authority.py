"""An authority of one's own: its certificate, a server's certificate for this machine, and keys of nodes."""

import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def authority(folder: Path) -> Path:
    """ca.crt, server.pem and server.key, as `coterie serve --certificates` wants them."""
    folder.mkdir(parents=True)
    name, host = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in ("an authority", "127.0.0.1"))
    own, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    mine = _certificate(name, name, own.public_key())
    mine = mine.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    of_server = _certificate(host, name, server.public_key())
    here = [x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("localhost")]
    of_server = of_server.add_extension(x509.SubjectAlternativeName(here), critical=False)
    for file, made in (("ca.crt", mine), ("server.pem", of_server)):
        (folder / file).write_bytes(made.sign(own, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(_private(server, serialization.PrivateFormat.PKCS8))
    return folder


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(x509.random_serial_number())
    return made.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def node_key(path: Path) -> Path:
    """A node's private key (P-384, OpenSSH), and beside it the public one."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(_private(key, serialization.PrivateFormat.OpenSSH))
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)
    return path
