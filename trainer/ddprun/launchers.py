"""Who may say a node's place, and how: one function for each launcher, from its environment to our words.

Pure. A word keeps where it was said, so that the contract can refuse it by name.
"""

import argparse
from collections.abc import Mapping
from typing import Literal

from ddprun.errors import bad_contract
from ddpwire import names

Word = Literal["nnodes", "nproc", "node_rank", "master_addr", "master_port", "run_id", "max_restarts"]
Words = dict[Word, tuple[str, str]]  # word → (where it was said, what was said)


def words(options: argparse.Namespace, environ: Mapping[str, str]) -> Words:
    """All that was said: flags before PET_*, PET_* before plain MASTER_*. Raises NodeError."""
    return from_plain(environ) | from_pet(environ) | from_flags(options)


def from_flags(options: argparse.Namespace) -> Words:
    """What the command line says."""
    words: Words = {}
    given: dict[Word, str | None] = {
        "nnodes": options.nnodes,
        "nproc": options.nproc_per_node,
        "node_rank": options.node_rank,
        "master_addr": options.master_addr,
        "master_port": options.master_port,
        "run_id": options.run_id,
        "max_restarts": options.max_restarts,
    }
    flags = {"nproc": "--nproc-per-node", "run_id": "--rdzv-id"}
    if options.rdzv_endpoint:
        host, _, port = options.rdzv_endpoint.rpartition(":")
        if not host:
            raise bad_contract(f"--rdzv-endpoint is {options.rdzv_endpoint!r}: HOST:PORT is what it takes")
        words |= {"master_addr": ("--rdzv-endpoint", host), "master_port": ("--rdzv-endpoint", port)}
    for word, value in given.items():
        if value is not None:
            words[word] = (flags.get(word, f"--{word.replace('_', '-')}"), value)
    if options.standalone:
        if words.get("nnodes", ("", "1"))[1] not in ("1", "1:1"):
            raise bad_contract(f"--standalone is one node, but --nnodes is {options.nnodes}: give one of the two")
        alone: Words = {"nnodes": ("--standalone", "1"), "node_rank": ("--standalone", "0")}
        words = alone | {"master_addr": ("--standalone", "127.0.0.1"), "master_port": ("--standalone", "0")} | words
    return words


def from_pet(environ: Mapping[str, str]) -> Words:
    """What torchrun's own variables say, which ddpctl and Kubeflow's operators set."""
    variables: dict[Word, str] = {
        "nnodes": names.NNODES,
        "nproc": names.NPROC_PER_NODE,
        "node_rank": names.NODE_RANK,
        "master_addr": names.NODE_MASTER_ADDR,
        "master_port": names.NODE_MASTER_PORT,
        "max_restarts": "PET_MAX_RESTARTS",
        "run_id": "PET_RDZV_ID",
    }
    return {word: (name, environ[name]) for word, name in variables.items() if environ.get(name)}


def from_plain(environ: Mapping[str, str]) -> Words:
    """What the variables say that scripts read, set by hand."""
    variables: dict[Word, str] = {
        "master_addr": names.MASTER_ADDR,
        "master_port": names.MASTER_PORT,
        "run_id": names.RUN_ID,
    }
    return {word: (name, environ[name]) for word, name in variables.items() if environ.get(name)}
