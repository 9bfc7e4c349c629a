"""Benchmark cells, and the report on them and on the whole run.

Inputs: results/<run>/{drafters,target,prepared,merged}/. Outputs: results/<run>/{benchmark,report}/.
"""


rule benchmark:
    """One cell: one task with one variant against the target alone, alternating, so many requests at a time."""
    input:
        drafter=variant_drafter,
        target="results/{run}/target/manifest.json",
        prepared="results/{run}/prepared/{task}/manifest.json",
        merged="results/{run}/merged/manifest.json",
    output:
        manifest=update("results/{run}/benchmark/{task}/{variant}/c{concurrency}/manifest.json"),
        cell=update("results/{run}/benchmark/{task}/{variant}/c{concurrency}/cell.json"),
    log:
        "results/{run}/logs/benchmark/{task}.{variant}.c{concurrency}.log",
    benchmark:
        "results/{run}/logs/benchmark/{task}.{variant}.c{concurrency}.benchmark.jsonl"
    priority: cell_priority
    conda:
        "../envs/aerie.yaml"
    threads: THREADS["benchmark"]
    resources:
        gpu=GPUS,
    params:
        **code("scripts/benchmark.py"),
        settings=cell_settings,
        runtime=cell_machine,
    shell:
        r"""
        python -m scripts.benchmark \
            --drafter {input.drafter:q} \
            --target {input.target:q} \
            --prepared {input.prepared:q} \
            --merged {input.merged:q} \
            --output {output.manifest:q} \
            --settings {params.settings:q} \
            --runtime {params.runtime:q} \
            2>&1 | tee {log:q}
        """


rule report:
    """Tables and plots of the whole run."""
    input:
        cells=CELLS,
        target="results/{run}/target/manifest.json",
        raw=expand("results/{{run}}/raw/{dataset}/manifest.json", dataset=DATASETS),
        prepared=expand("results/{{run}}/prepared/{dataset}/manifest.json", dataset=DATASETS),
        responses=expand("results/{{run}}/responses/{dataset}/manifest.json", dataset=PROMPTS),
        tokens=expand("results/{{run}}/tokens/{dataset}/manifest.json", dataset=DATASETS),
        merged="results/{run}/merged/manifest.json",
        vocab="results/{run}/vocab/manifest.json",
        hidden="results/{run}/hidden/manifest.json",
        drafters=expand("results/{{run}}/drafters/{drafter}/manifest.json", drafter=DRAFTERS),
    output:
        manifest=update("results/{run}/report/manifest.json"),
        markdown=update("results/{run}/report/benchmark.md"),
        csv=update("results/{run}/report/benchmark.csv"),
        html=update("results/{run}/report/benchmark.html"),
        plan=update("results/{run}/report/plan.md"),
    log:
        "results/{run}/logs/report.log",
    benchmark:
        "results/{run}/logs/report.benchmark.jsonl"
    localrule: True
    conda:
        "../envs/aerie.yaml"
    params:
        **code("scripts/report.py"),
        settings=canonical({"run": RUN}),
    shell:
        r"""
        python -m scripts.report \
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
