"""What stage generate will take, from the answers to a few rows of each dataset: `snakemake calibration`.

Inputs: results/<run>/{prepared,target}/. Outputs: results/<run>/calibration/<dataset>/, which no other rule reads.
"""


rule calibrate:
    """Tokens and hours of one dataset's answers, as intervals."""
    input:
        prepared="results/{run}/prepared/{dataset}/manifest.json",
        target="results/{run}/target/manifest.json",
    output:
        manifest=update("results/{run}/calibration/{dataset}/manifest.json"),
    log:
        "results/{run}/logs/calibrate/{dataset}.log",
    benchmark:
        "results/{run}/logs/calibrate/{dataset}.benchmark.jsonl"
    conda:
        "../envs/aerie.yaml"
    threads: THREADS["generate"]
    resources:
        gpu=0 if SERVED and ATTACHED else GPUS,
        asks_short=asks("short"),
        asks_long=asks("long"),
    params:
        **code("scripts/calibrate.py"),
        settings=generate_settings,
        runtime=generate_runtime,
    shell:
        r"""
        python -m scripts.calibrate \
            --prepared {input.prepared:q} \
            --target {input.target:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            --runtime {params.runtime:q} \
            2>&1 | tee {log:q}
        """


rule calibration:
    """All datasets that the target answers."""
    input:
        expand("results/{run}/calibration/{dataset}/manifest.json", run=RUN, dataset=PROMPTS),
    localrule: True
