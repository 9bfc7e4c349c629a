"""What a run will take, before it takes it.

Inputs: results/<run>/{prepared,target}/. Output: results/<run>/plan.md, which no other rule reads.
"""


rule plan:
    """Rows, tokens and bytes of the run, known before the target answers anything."""
    input:
        prepared=expand("results/{{run}}/prepared/{dataset}/manifest.json", dataset=DATASETS),
        target="results/{run}/target/manifest.json",
    output:
        plan="results/{run}/plan.md",
    log:
        "results/{run}/logs/plan.log",
    benchmark:
        "results/{run}/logs/plan.benchmark.jsonl"
    localrule: True
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/plan.py"),
        settings=settings("run", "generate", "encode", "hidden", "drafters", "vocab", "runtime", scaling=config["runtime"].get("scaling")),
    shell:
        r"""
        python -m scripts.plan \
            --prepared {input.prepared:q} \
            --target {input.target:q} \
            --output {output.plan:q} \
            --settings {params.settings:q} \
            2>&1 | tee {log:q}
        """
