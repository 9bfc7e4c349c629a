"""Responses written by the target itself.

Inputs: results/<run>/{prepared,target}/. Outputs: results/<run>/responses/<dataset>/.
"""


rule generate:
    """The target's own answers to one dataset's prompts."""
    input:
        prepared="results/{run}/prepared/{dataset}/manifest.json",
        # Named for its size alone: the scheduler starts the job with the largest inputs first, so that none runs alone at the end.
        rows=ancient("results/{run}/prepared/{dataset}/rows-00000.parquet"),
        target="results/{run}/target/manifest.json",
    output:
        manifest=update("results/{run}/responses/{dataset}/manifest.json"),
    log:
        "results/{run}/logs/generate/{dataset}.log",
    benchmark:
        "results/{run}/logs/generate/{dataset}.benchmark.jsonl"
    conda:
        "../envs/aerie.yaml"
    threads: THREADS["generate"]
    resources:
        gpu=0 if SERVED and ATTACHED else GPUS,
        asks_short=asks("short"),
        asks_long=asks("long"),
    params:
        **code("scripts/generate.py"),
        settings=generate_settings,
        runtime=generate_runtime,
    shell:
        r"""
        python -m scripts.generate \
            --prepared {input.prepared:q} \
            --target {input.target:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            --runtime {params.runtime:q} \
            2>&1 | tee {log:q}
        """
