"""Hidden states of the target on the merged rows.

Inputs: results/<run>/{merged,target}/. Outputs: results/<run>/hidden/.
"""


rule hidden:
    """Aux states at three boundaries, and final states where a teacher is needed."""
    input:
        merged="results/{run}/merged/manifest.json",
        target="results/{run}/target/manifest.json",
    output:
        manifest=update("results/{run}/hidden/manifest.json"),
    log:
        "results/{run}/logs/hidden.log",
    benchmark:
        "results/{run}/logs/hidden.benchmark.jsonl"
    priority: 1  # before any cell: servers of a benchmark hold GPU memory for a while
    conda:
        "../envs/aerie.yaml"
    threads: THREADS["hidden"]
    resources:
        gpu=GPUS,
    params:
        **code("scripts/hidden.py"),
        settings=hidden_settings,
        runtime=hidden_machine,
    shell:
        r"""
        python -m scripts.hidden \
            --merged {input.merged:q} \
            --target {input.target:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            --runtime {params.runtime:q} \
            2>&1 | tee {log:q}
        """
