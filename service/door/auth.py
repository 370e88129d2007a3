"""Identifies callers, and decides what they may call.

    metadata `authorization: Bearer …` ─┐
    certificate of the client (mTLS) ───┴─▶ Authenticator ─▶ Permit(caller) ─▶ check, check, …

Callers are listed in a file (`service.door.callers_file`), which is read again when it changes.
Without a file every caller is "anonymous" and may call everything. With a file, callers may only
make the calls that it grants, and health checks. If a token is sent, it alone decides; the
certificate counts only without a token. `service.admission.accounts` decides which account a call
is charged to.

`interceptors.Entrance` gets a permit here for every RPC and sets `current_permit` in the RPC's
task. Servicers read it once, at their start. Long RPCs check it again, against the current callers'
file. If nothing has changed, a check costs a look at the file's timestamps and one comparison. If
the file has changed, a thread reads it; the call that noticed waits for this, and other running
calls do not. Only the digest of a token is kept for the check.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar

from engine.contract.errors import ConfigError
from service.admission.accounts import (
    ON_BEHALF_OF,
    Metadata,
    account_at,
    account_of,
    name_in,
)
from service.door.callers_file import (
    EVERYONE,
    MAX_FILE_BYTES,
    CallerEntry,
    CallerTable,
    parse_callers,
)
from service.door.watched_files import WatchedFiles, read
from service.errors.call_errors import NotGrantedError, UnknownCallerError

logger = logging.getLogger(__name__)

DOOR_SECRET = "x-headrace-door"
DOOR_PEER = "x-headrace-peer"
"""The metadata keys of the HTTP door's secret, and of the IP address of the door's client."""

_MISSING = "authorization is missing: send 'authorization: Bearer <token>'"

current_permit: ContextVar[Permit] = ContextVar("permit")
"""The permit of the RPC that the current task serves."""


class Permit:
    """A caller's permission to make an RPC, valid as long as the callers' file grants it.

    Attributes:
        caller: the caller's entry in the callers' file at the last check.
        account: the account that the call is charged to, with the weight at that time.
    """

    __slots__ = ("_find", "_name", "_table", "_tables", "account", "caller")

    def __init__(
        self,
        caller: CallerEntry,
        tables: WatchedFiles[CallerTable] | None = None,
        table: CallerTable | None = None,
        find: Callable[[CallerTable], CallerEntry] | None = None,
    ) -> None:
        """Make a permit.

        Args:
            caller: the caller's entry.
            tables: the callers' file, or None if every caller may call everything.
            table: the version of the file in which `caller` was found.
            find: looks up the caller in another version. Raises the same errors as `check`.
        """
        self.caller = caller
        self.account = account_of(caller.identity, weight=caller.weight)
        self._name: str | None = None
        self._tables = tables
        self._table = table
        self._find = find

    def of_call(self, metadata: Metadata, peer: str) -> Permit:
        """Return the permit of one call, with the account it is charged to.

        Args:
            metadata: the call's metadata.
            peer: the call's origin, in gRPC's format.

        Raises:
            CallerNameError: the metadata name a user, and the name is malformed.
            NotGrantedError: the caller may not call for others.
        """
        permit = Permit(self.caller, self._tables, self._table, self._find)
        if ON_BEHALF_OF in dict(metadata):
            permit._name = name_in(metadata)
        if self._tables is None:
            if permit._name is not None:
                raise NotGrantedError(
                    f"nobody may send {ON_BEHALF_OF} here: this server has no callers' file "
                    "(auth_file) that would say who may",
                    "ON_BEHALF_OF_NOT_GRANTED",
                )
            permit.account = account_at(self.caller.identity, peer)
        else:
            permit._set_account()
        return permit

    def _set_account(self) -> None:
        caller = self.caller
        if self._name is not None and not caller.may_call_for_others:
            raise NotGrantedError(
                f"{caller.identity!r} may not send {ON_BEHALF_OF}; may_call_for_others must be "
                "granted to them",
                "ON_BEHALF_OF_NOT_GRANTED",
            )
        self.account = account_of(caller.identity, self._name, caller.weight)

    async def check(self) -> None:
        """Check the permit against the current callers' file, and update it from there.

        Raises:
            UnknownCallerError: the token or certificate no longer belongs to that caller.
            NotGrantedError: the caller may no longer call this service, or no longer call for
                others.
        """
        if self._tables is None or self._find is None:
            return
        table = await self._tables.fresh()
        if table is self._table:
            return
        found = self._find(table)
        if found.identity != self.caller.identity:
            raise UnknownCallerError(
                "IDENTITY_CHANGED",
                "what this call was opened with belongs to another identity by now; open a new one",
            )
        self.caller = found
        self._set_account()
        self._table = table


_ANYBODY = Permit(EVERYONE)


class Authenticator:
    """Identifies callers."""

    def __init__(
        self,
        path: str | None,
        *,
        client_certificates: bool = False,
        door_secret: str | None = None,
    ) -> None:
        """Read the callers' file.

        Args:
            path: the file, or None if every caller may call everything.
            client_certificates: whether clients are asked for certificates.
            door_secret: the secret of the HTTP door, or None if there is no door.

        Raises:
            ConfigError: the file cannot be read, or an entry is wrong.
        """
        self._client_certificates = client_certificates
        self._door_secret = door_secret
        self.tables: WatchedFiles[CallerTable] | None = (
            None  # whoever asks for a caller has it fresh
        )
        if path is not None:
            self.tables = WatchedFiles(
                "callers", (path,), lambda: self._load(path), private=(path,)
            )

    @property
    def knows_callers(self) -> bool:
        """Whether there is a callers' file."""
        return self.tables is not None

    def peer_of(self, metadata: Metadata, peer: str) -> str:
        """Return the origin of a call in gRPC's format. gRPC sees all calls of the HTTP door as
        coming from one Unix socket. The door sends its client's address, which is trusted if the
        door also sends the secret.

        Args:
            metadata: the call's metadata.
            peer: the origin of its connection.

        Raises:
            NotGrantedError: the call has a wrong secret. The error does not reveal the right one.
        """
        given = [str(value) for key, value in metadata if key == DOOR_SECRET]
        if not given:
            return peer
        known = self._door_secret or ""
        if not known or not all(hmac.compare_digest(one.encode(), known.encode()) for one in given):
            raise NotGrantedError(
                f"{DOOR_SECRET} is not what this server gave to its HTTP door; leave it out",
                "DOOR_UNKNOWN",
            )
        try:
            address = ipaddress.ip_address(str(dict(metadata).get(DOOR_PEER)))
        except ValueError:  # the door asks for itself
            return peer
        return f"ipv{address.version}:[{address}]:0"

    def reload(self) -> None:
        """Start reading the file again. Calls that arrive now wait for this. If the file cannot be
        used, this is logged, and nothing changes.
        """
        if self.tables is not None:
            self.tables.begin_reload()

    def become(self, other: Authenticator) -> None:
        """Use another authenticator's file from now on, also for running calls."""
        if self.tables is not None and other.tables is not None:
            self.tables.become(other.tables)

    def by_token(self, method: str, metadata: Metadata) -> Permit | None:
        """Identify the caller of a method by its token, according to the file's last reading.
        Return None if the certificate decides.

        Args:
            method: /package.Service/Method.
            metadata: the call's metadata.

        Raises:
            UnknownCallerError: the token is unknown, or no token was sent and certificates are not
                used.
            NotGrantedError: the caller may not call this service.
        """
        if self.tables is None:
            return _ANYBODY
        given = [value for key, value in metadata if key == "authorization"]
        if not given:
            if self._client_certificates:
                return None
            raise UnknownCallerError("TOKEN_MISSING", _MISSING)
        if len(given) > 1:
            raise UnknownCallerError("TOKEN_INVALID", "authorization was sent more than once")
        value = given[0].encode("utf-8", "replace") if isinstance(given[0], str) else given[0]
        scheme, _, token = value.partition(b" ")
        digest = hashlib.sha256(token.strip(b" ")).digest()
        is_bearer = scheme.lower() == b"bearer"

        def find(table: CallerTable) -> CallerEntry:
            found = table.by_digest(digest)
            if found is None or not is_bearer:
                raise UnknownCallerError(
                    "TOKEN_INVALID", "authorization is not a bearer token that this server knows"
                )
            return _allowed(found, method)

        return _permit_of(self.tables, find)

    def by_certificate(self, method: str, names: Iterable[str]) -> Permit:
        """Identify the caller of a method by its certificate.

        Args:
            method: /package.Service/Method.
            names: the names in the client's verified certificate; empty if it has none.

        Raises:
            UnknownCallerError: the certificate is unknown, or belongs to several callers.
            NotGrantedError: the caller may not call this service.
        """
        if self.tables is None:
            return _ANYBODY
        names = tuple(names)
        if not names:
            raise UnknownCallerError("TOKEN_MISSING", _MISSING)

        def find(table: CallerTable) -> CallerEntry:
            found = table.by_names(names)
            if len(found) != 1:
                what = "of more than one caller" if found else "that this server does not know"
                raise UnknownCallerError(
                    "CERTIFICATE_UNKNOWN",
                    f"the client certificate has names {what}; send 'authorization: Bearer "
                    "<token>', or use another certificate",
                )
            [caller] = found
            return _allowed(caller, method)

        return _permit_of(self.tables, find)

    def _load(self, path: str) -> CallerTable:
        try:
            table = parse_callers(read("auth_file", path, MAX_FILE_BYTES).decode())
        except UnicodeDecodeError as error:
            raise ConfigError("auth_file", f"{path} is not UTF-8") from error
        if table.certificates and not self._client_certificates:
            logger.warning(
                "%s names certificates, but clients are not asked for any: set tls_client_ca", path
            )
        return table


def _allowed(caller: CallerEntry, method: str) -> CallerEntry:
    if not caller.may_call(method):
        raise NotGrantedError(
            f"{caller.identity!r} may not call {method}; its service must be granted to them"
        )
    return caller


def _permit_of(
    tables: WatchedFiles[CallerTable], find: Callable[[CallerTable], CallerEntry]
) -> Permit:
    table = tables.last
    return Permit(find(table), tables, table, find)
