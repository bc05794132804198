"""All that a run's figures depend on beside its policy, rate and seed: two runs are compared only where it is equal.

Knows nothing about runs. How many blocks the cache has is no part of it unless it was asked for: it differs a little
from start to start, and decides nothing before the cache is full.
"""

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from bulletserve.code_digest import ENGINE, code_digest
from bulletserve.comparison import arm_run
from bulletserve.compose import Engine
from bulletserve.core.slo import Slo
from bulletserve.formats.description import Weights
from bulletserve.results import ENGINE_PACKAGES, versions_of
from bulletserve.scheduler.policies import make_policy
from bulletserve.simulator.experiment import ignores_targets
from bulletserve.workload.request_list import RequestLengths

ANY = "any"
"""Of what a policy does not look at: one run of it tells of all targets."""


def fingerprint(engine: Engine, policy: str, requests: str, slo: Slo) -> dict[str, str]:
    """By name, as texts. `requests`: a digest of the list."""
    blind = ignores_targets(make_policy(policy))
    known = engine.find_forecasts(needed=False)
    config, limits = engine.config, engine.limits
    packages = versions_of(ENGINE_PACKAGES)
    return {
        "model": engine.info.model_name,
        "shape": digest(sorted(asdict(engine.checkpoint.shape).items())),
        "weights": config.load_format,
        "weight files": _files(engine.checkpoint.weights),
        "dtype": engine.info.dtype,
        "device": engine.info.device,
        "partitions": " ".join(f"{one.prefill_sms}+{one.decode_sms}" for one in limits.lattice.partitions),
        "most requests": str(limits.max_seqs),
        "cache": f"{config.num_gpu_blocks_override or 'what fits'} x {limits.block_size}",
        "prefix cache": str(config.enable_prefix_caching),
        "packages": ", ".join(f"{name} {packages[name]}" for name in sorted(packages)),
        "code": code_digest(ENGINE, policy, str(Path(arm_run.__file__))),
        "calibration": ANY if blind else "none" if known is None else known.calibration.hash,
        "targets": ANY if blind else f"{slo.ttft_s} {slo.tpot_s}",
        "requests": requests,
    }


def digest_of(requests: Sequence[RequestLengths]) -> str:
    """Of a list: its arrivals at one a second and its lengths."""
    return digest([(one.arrival_s, one.prompt_tokens, one.output_tokens) for one in requests])


def digest(plain: object) -> str:
    """Of plain values, or of dataclasses of such."""
    return sha256(repr(plain).encode()).hexdigest()[:12]


def _files(weights: Weights | None) -> str:
    """Names and sizes."""
    return ", ".join(f"{path.name} {path.stat().st_size}" for path in weights.paths()) if weights else "none"
