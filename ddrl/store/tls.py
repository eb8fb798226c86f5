"""TLS of `rediss://` URLs: the server's certificate and name are always verified, by redis-py and Kombu alike.

Kombu takes a bare `rediss://` for leave to verify nothing, and redis-py takes options that switch verification
off; so whatever is needed is spelled out in the URL that both are given, and such options are refused.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

CA_VARIABLE = "DDRL_REDIS_CA"
FILES = {  # option of the URL -> what it names
    "ssl_ca_certs": "certificates of CAs to trust besides the system's (PEM)",
    "ssl_certfile": "the client's certificate (PEM)",
    "ssl_keyfile": "the client's private key (PEM)",
}

HUNG_UP = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""The other side went away; not a word of TLS."""

_HOST_MISMATCH, _IP_MISMATCH, _EXPIRED, _NOT_YET_VALID = 62, 64, 10, 9  # OpenSSL's X509_V_ERR_*


def spelled_out(server_url: str) -> str:
    """A `rediss://` URL with all that verification needs in its query; other URLs as they are.

    Raises:
        ValueError: an option that cannot be used, with the remedy; never with a secret.
    """
    parts = urlsplit(server_url)
    options = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
    given = {name: value for name, value in options.items() if name.startswith("ssl_")}
    ca = os.environ.get(CA_VARIABLE)
    if parts.scheme != "rediss":
        if given:
            raise ValueError(f"{min(given)} is for TLS; write rediss:// or leave it out")
        if ca and parts.scheme == "redis":
            raise ValueError(f"{CA_VARIABLE} asks for TLS, redis:// has none; write rediss:// or unset it")
        return server_url
    added = {}
    if given.pop("ssl_cert_reqs", "required") != "required" or "ssl_check_hostname" in given:
        raise ValueError(
            f"certificates are always verified; leave ssl_cert_reqs and ssl_check_hostname out"
            f" and name the CA in {CA_VARIABLE}"
        )
    if "ssl_cert_reqs" not in options:
        added["ssl_cert_reqs"] = "required"
    if ca and "ssl_ca_certs" not in options:
        given["ssl_ca_certs"] = added["ssl_ca_certs"] = ca
    for name, value in given.items():
        if name not in FILES:
            raise ValueError(f"{name}: unknown option; use {', '.join(FILES)}")
        if not os.access(value, os.R_OK) or not Path(value).is_file():
            where = CA_VARIABLE if name in added else name
            raise ValueError(f"{where}={value}: no file that can be read; name {FILES[name]}")
    if ("ssl_certfile" in given) != ("ssl_keyfile" in given):
        raise ValueError("ssl_certfile and ssl_keyfile go together; give both")
    query = "&".join(f"{name}={quote(value)}" for name, value in added.items())
    return server_url + ("&" if parts.query else "?") * bool(query) + query


def options(server_url: str) -> dict[str, object]:
    """Keyword arguments of a connection that say the same as the query of a `spelled_out` URL."""
    if not server_url.startswith("rediss://"):
        return {}
    query = parse_qs(urlsplit(server_url).query)
    files: dict[str, object] = {name: query[name][0] for name in FILES if name in query}
    return {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True, **files}


def explain(error: BaseException) -> tuple[str, str] | None:
    """What is wrong with TLS and what to do about it, if TLS is what went wrong.

    Args:
        error: raised by a client; its causes are looked through.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if found is None or isinstance(found, HUNG_UP):
        return None
    if isinstance(found, ssl.SSLCertVerificationError):
        return _certificate(found)
    reason = found.reason or ""
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"):
        return "does not speak TLS", "use the port that does, or redis:// on a network you trust"
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return "asks for a client certificate", "add ?ssl_certfile=...&ssl_keyfile=... to the URL"
    if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason:
        return "refuses the client certificate", "use one that its CA has signed"
    return f"TLS failed ({reason.lower().replace('_', ' ') or found})", "see the server's log"


def _certificate(error: ssl.SSLCertVerificationError) -> tuple[str, str]:
    code = error.verify_code
    if code in (_HOST_MISMATCH, _IP_MISMATCH):
        return "its certificate is for another name", "use a name that it holds, or issue it for this one"
    if code == _EXPIRED:
        return "its certificate has expired", "renew it on the server"
    if code == _NOT_YET_VALID:
        return "its certificate is not valid yet", "set this machine's clock"
    return (
        f"its certificate is not trusted ({error.verify_message})",
        f"name the CA's file in {CA_VARIABLE} or by ?ssl_ca_certs=",
    )
