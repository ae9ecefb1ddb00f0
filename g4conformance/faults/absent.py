"""The public catalogue's faults that cannot exist here, each with the reason: no feature is built to be broken."""

from __future__ import annotations

ABSENT: dict[str, str] = {
    "grid-stride-from-batch-max": "needs a batch of pictures; a static layout has one image slot and batch size 1",
    "fusion-zero-length-slice": "an export failure that no tensor shows; tests export the fusion graph at both ends",
    "media-order-vs-placeholder-order": "needs several kinds of media; there are no video or audio features",
    "audio-treated-as-vision-block": "needs audio",
    "ple-not-sliced-per-chunk": "needs chunked prefill; the static runtime prefills in one pass",
    "moe-path-dropped": "needs a mixture of experts, which the runtime refuses to load",
    "moe-per-expert-scale-twice": "needs a mixture of experts, which the runtime refuses to load",
    "ring-cache-duplicate-slots": "needs a ring cache; the static cache has a row for every position",
    "evicted-index-not-position": "needs a cache that evicts; the static cache has a row for every position",
    "donor-read-before-commit": "needs asynchronous execution",
    "placeholder-tokens-not-suppressed": "the reference suppresses nothing either: its config names no such tokens",
}
