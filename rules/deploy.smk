"""The drafter to hand on, when asked for: `snakemake results/RUN/deploy/README.md`.

Inputs: all that the report reads. Outputs: results/<run>/deploy/.
"""


rule deploy:
    """The fastest drafter with scripts that serve and check it."""
    input:
        **rules.report.input,
    output:
        manifest=update("results/{run}/deploy/manifest.json"),
        readme=update("results/{run}/deploy/README.md"),
        serve=update("results/{run}/deploy/serve.sh"),
    log:
        "results/{run}/logs/deploy.log",
    benchmark:
        "results/{run}/logs/deploy.benchmark.jsonl"
    localrule: True
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/deploy.py"),
        settings=canonical({"run": RUN}),
    shell:
        r"""
        python -m scripts.deploy \
            --cells {input.cells:q} \
            --target {input.target:q} \
            --raw {input.raw:q} \
            --prepared {input.prepared:q} \
            --responses {input.responses:q} \
            --tokens {input.tokens:q} \
            --merged {input.merged:q} \
            --vocab {input.vocab:q} \
            --hidden {input.hidden:q} \
            --drafters {input.drafters:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            2>&1 | tee {log:q}
        """
