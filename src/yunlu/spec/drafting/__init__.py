"""Drafts of jobs from the scripts and configurations of other tools, which are read and never run."""
