"""Charges for results in memory: unread output of requests, messages that are being sent, and
answers of one message.

    a token comes ──▶ the request's charge ──▶ its account's unread bytes (`service.admission`)
    a stream takes it ──────▶ the stream's charge, until the message was sent
    GetResult, Generate ────▶ the answer's charge, until its call is over

Charges are in whole units. A reader that keeps up has less than one unit unread, and is charged
nothing here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.contract.types import CallerKey
from service.admission.accounts import Account
from service.admission.admission_control import AdmissionControl

UNIT = 2 << 10
"""The unit of charges, in bytes. Fractions of a unit are not charged."""


def in_units(size: int) -> int:
    """Round a number of bytes down to whole units."""
    return size & -UNIT


class RequestCharge:
    """The charge for one request's unread output.

    Attributes:
        size: the number of bytes that are charged.
    """

    __slots__ = ("_account", "_admission", "_beyond", "_leaves", "size")

    def __init__(self, admission: AdmissionControl, account: Account) -> None:
        """`account`: the account that is charged."""
        self._admission = admission
        self._account = account
        self._beyond = 0  # of the size, what came although there was no room
        self._leaves = False
        self.size = 0

    def set(self, size: int) -> None:
        """Set the charge to `size` bytes. Output that arrives while the account has no room does
        not count against others; see `AdmissionControl.exceed`.
        """
        size = in_units(size)
        grown = size - self.size
        if not grown:
            return
        admission, beyond = self._admission, min(self._beyond, size)
        if grown > 0 and not admission.has_room(self._account):
            beyond += grown
        admission.exceed(beyond - self._beyond)
        admission.charge_unread(self._account, grown, leaves=self._leaves)
        self.size, self._beyond = size, beyond

    def leave(self) -> None:
        """Record that the request was ended for lack of room; see `AdmissionControl.leave`."""
        self._leaves = True
        self._admission.leave(self.size)


class StreamCharge:
    """The charge for a stream's message while it is being sent."""

    __slots__ = ("_account", "_admission", "_size")

    def __init__(self, admission: AdmissionControl, account: Account) -> None:
        """`account`: the owner of the stream."""
        self._admission = admission
        self._account = account
        self._size = 0

    def set(self, size: int) -> None:
        """Set the charge to `size` bytes, or to 0 if nothing is being sent."""
        size = in_units(size)
        if size != self._size:
            self._admission.charge_unread(self._account, size - self._size, leaves=True)
            self._size = size


class AnswerCharges:
    """The charges for answers of one message until their calls are over, since clients may not read
    them.
    """

    def __init__(self, admission: AdmissionControl) -> None:
        self._admission = admission
        self._sent: Counter[CallerKey] = Counter()  # answers that are being sent

    def add(self, account: Account, size: int, context: Any, *, may_wait: bool = True) -> None:
        """Charge an account for an answer.

        Args:
            account: the caller's account.
            size: the approximate number of bytes of memory that the answer takes.
            context: the RPC's context.
            may_wait: whether the answer can be requested again, and so may be refused. A caller's
                only answer is never refused, so that it can always read results when it has too
                many unread.

        Raises:
            LimitReachedError: unread results, including other answers, leave no room for it.
        """
        size, key, sent = in_units(size), account.key, self._sent
        if not size:
            return
        if may_wait and sent[key]:
            self._admission.check_unread(account)
        sent[key] += 1
        self._admission.charge_unread(account, size, leaves=True)

        def over(_: object) -> None:
            self._admission.charge_unread(account, -size, leaves=True)
            sent[key] -= 1
            if not sent[key]:
                del sent[key]

        context.add_done_callback(over)
