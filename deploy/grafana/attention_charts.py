"""Charts of attention: what ran, what is proven of it, how fast it was."""

from chart import BANDWIDTH, DISPATCHES, FALLBACKS, MODEL, TFLOPS, WHERE, Chart, Kind, rate

ATTENTION = (
    Chart(
        "Path share",
        "Every dispatch by the kernel path that served it.",
        "percentunit",
        ((f"sum by (phase, path) ({DISPATCHES})", "{{phase}} {{path}}"),),
        Kind.SHARES,
    ),
    Chart(
        "Fallbacks by reason",
        "Dispatches on another path than the wanted one, a second. Anything above 0 pages.",
        "ops",
        ((f"sum by (phase, from, to, reason) ({FALLBACKS})", "{{phase}}: {{from}} to {{to}}, {{reason}}"),),
    ),
    Chart(
        "Dispatches by status of their evidence",
        "proven: by the reviewed matrix. provisional: by this machine at start-up. The others page.",
        "percentunit",
        ((f"sum by (status) ({DISPATCHES})", "{{status}}"),),
        Kind.SHARES,
    ),
    Chart(
        "Attestation, shadow checks and compiles after ready",
        "Profiled forwards and attention computed again in fp64, by what they showed; kernels compiled in service.",
        "none",
        (
            (f"sum by (result) (increase(hallmark_attestation_total{{{WHERE}}}[1h]))", "attestation: {{result}}"),
            (
                f'sum(increase(hallmark_kernel_compiles_total{{{WHERE}, after_ready="true"}}[1h]))',
                "compiled after ready",
            ),
            (
                f"sum by (result) (increase(hallmark_shadow_checks_total{{{WHERE}}}[1h]))",
                "shadow checks: {{result}}",
            ),
        ),
    ),
    Chart(
        "Time of a forward pass by what is known of its kernels",
        "evidence: proven. named: small, in the list. unproven: an operator's, no evidence. unexplained: none of it.",
        "percentunit",
        ((f"max by (phase, class) (hallmark_forward_time_ratio{{{WHERE}}})", "{{phase}}: {{class}}"),),
    ),
)

MATRIX = (
    Chart(
        "The plan: what serves each phase and context bucket",
        "Rows exist from the moment a server is ready; the count is of dispatches since then.",
        "none",
        (
            (
                f"sum by (model, phase, bucket, path, status) (hallmark_attention_dispatch_total{{{MODEL}, {WHERE}}})",
                "",
            ),
        ),
        Kind.TABLE,
    ),
    Chart(
        "Shapes of the plan by status",
        "How many attention shapes each server's plan holds.",
        "none",
        ((f"sum by (instance, status) (hallmark_qualification_shapes{{{WHERE}}}) > 0", ""),),
        Kind.TABLE,
        width=6,
    ),
    Chart(
        "Matrix",
        "Digest and verdict of the matrix that each server uses.",
        "none",
        ((f"max by (instance, digest, verdict) (hallmark_matrix_info{{{WHERE}}})", ""),),
        Kind.TABLE,
        width=6,
    ),
)

EFFICIENCY = (
    Chart(
        "Against the floor",
        "The least time by the device's limits (above) over the measured kernel time: at 1 it is the floor.",
        "percentunit",
        (
            (
                "max by (phase, bucket) ("
                f'label_replace({TFLOPS} / $peak_tflops, "limit", "compute", "", "") or '
                f'label_replace({BANDWIDTH} / ($peak_tbytes * 1e12), "limit", "memory", "", ""))',
                "{{phase}} {{bucket}}",
            ),
        ),
        width=6,
    ),
    Chart(
        "Achieved TFLOP/s",
        "Causal attention counts half the square; decode, bound by memory, is left out. "
        "One layer of one step in 64, by events on the device.",
        "none",
        ((f"max by (phase, bucket) ({TFLOPS})", "{{phase}} {{bucket}}"),),
        width=6,
    ),
    Chart(
        "Achieved bandwidth",
        "Bytes by the IO model over the kernel's time.",
        "Bps",
        (
            (
                f"max by (phase, bucket) ({BANDWIDTH})",
                "{{phase}} {{bucket}}",
            ),
        ),
        width=6,
    ),
    Chart(
        "Sampled kernel time",
        "Seconds of attention a second, in the sampled steps.",
        "s",
        (
            (
                f"sum by (phase) ({rate('hallmark_attention_sampled_kernel_seconds_total', WHERE)})",
                "{{phase}}",
            ),
        ),
        width=6,
    ),
)
