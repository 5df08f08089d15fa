"""Measuring this machine: how fast its operators, memory, links and disk are."""
