"""Ownership cost of a machine, and its break-even against renting."""

from __future__ import annotations

import math

from pydantic import Field

from yunlu.core.value import Value

HOURS_PER_YEAR = 365.25 * 24


class Ownership(Value):
    """What was paid for a machine and what is paid while it stands there."""

    purchase_dollars: float = Field(ge=0, allow_inf_nan=False)
    """The whole machine, with network and set-up."""
    years: float = Field(default=4, gt=0, le=30)
    """Over which it is written off."""
    resale_dollars: float = Field(default=0, ge=0, allow_inf_nan=False)
    """What it brings in after those years."""
    interest: float = Field(default=0, ge=0, le=1)
    """Yearly cost of the money bound in it: 0.06 is 6 %."""
    power_kw: float = Field(gt=0, allow_inf_nan=False)
    """Drawn while it works."""
    idle_share: float = Field(default=0.25, ge=0, le=1)
    """Of that power while it waits."""
    dollars_per_kwh: float = Field(ge=0, allow_inf_nan=False)
    cooling: float = Field(default=1.3, ge=1, le=5)
    """Power of the room for each unit of the machine's (PUE)."""
    utilisation: float = Field(default=0.5, gt=0, le=1)
    """Share of all hours in which it works for somebody."""
    yearly_dollars: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Staff, hosting, insurance, repairs."""

    @property
    def used_hours(self) -> float:
        """Hours of work in its life."""
        return self.years * HOURS_PER_YEAR * self.utilisation

    @property
    def capital_dollars(self) -> float:
        """What it loses in value in its life, and the interest on what is bound on average."""
        bound = (self.purchase_dollars + self.resale_dollars) / 2
        return self.purchase_dollars - self.resale_dollars + bound * self.interest * self.years

    @property
    def upkeep_dollars(self) -> float:
        """Staff and hosting of its life."""
        return self.yearly_dollars * self.years

    @property
    def working_dollars_per_hour(self) -> float:
        """Power of an hour of work, cooling included."""
        return self.power_kw * self.cooling * self.dollars_per_kwh

    @property
    def idle_dollars_per_hour(self) -> float:
        """Power of an hour of waiting."""
        return self.working_dollars_per_hour * self.idle_share

    @property
    def power_dollars(self) -> float:
        """Power of its life, at its utilisation."""
        idle_hours = self.years * HOURS_PER_YEAR - self.used_hours
        return (
            self.used_hours * self.working_dollars_per_hour
            + idle_hours * self.idle_dollars_per_hour
        )

    @property
    def total_dollars(self) -> float:
        """All it costs in its life, at its utilisation."""
        return self.capital_dollars + self.upkeep_dollars + self.power_dollars

    @property
    def dollars_per_hour(self) -> float:
        """Of an hour of work: all costs, shared out over the hours in which it works."""
        return self.total_dollars / self.used_hours


class BreakEven(Value):
    """An own machine beside the rent of as much."""

    rent_dollars_per_hour: float
    own_dollars_per_hour: float
    rent_dollars: float
    """For the hours in which the own machine works in its life."""
    own_dollars: float
    hours: float
    """Of work from which on owning is cheaper; infinite where its power alone costs more."""
    utilisation: float
    """The same as a share of all hours of its life; above 1 it is never reached."""

    @property
    def owning_wins(self) -> bool:
        """At the utilisation that was stated."""
        return self.own_dollars < self.rent_dollars


def compare_rent(own: Ownership, rent_dollars_per_hour: float) -> BreakEven:
    """Own a machine, or rent as much by the hour: rent is paid for hours of work only."""
    life_hours = own.years * HOURS_PER_YEAR
    standing = own.capital_dollars + own.upkeep_dollars + life_hours * own.idle_dollars_per_hour
    saved_per_hour = rent_dollars_per_hour - (
        own.working_dollars_per_hour - own.idle_dollars_per_hour
    )
    hours = standing / saved_per_hour if saved_per_hour > 0 else math.inf
    return BreakEven(
        rent_dollars_per_hour=rent_dollars_per_hour,
        own_dollars_per_hour=own.dollars_per_hour,
        rent_dollars=rent_dollars_per_hour * own.used_hours,
        own_dollars=own.total_dollars,
        hours=hours,
        utilisation=hours / life_hours,
    )
