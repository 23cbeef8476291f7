"""The end of the batch script: whether the run goes on in a new allocation. Text."""

from ddpwire.exits import Exit

IN_VAIN = 3  # starts without a newer checkpoint


def ending(requeues: int) -> str:
    """What follows when srun has returned; ``code`` is what it said."""
    return _END.format(exits=Exit, requeues=requeues, last=IN_VAIN + 1, in_vain=IN_VAIN)


_END = """\
# What comes next is in the outcome that all nodes agreed on. A run goes on in a new allocation when Slurm ended this
# one, or when the outcome says that it may help, as long as there are new checkpoints; never after scancel or a stop.
retry() {{
  ((warned)) || grep -qs '"retry": true' "$run_dir"/node-*/outcome.json ||
    {{ ((code == {exits.KILLED:d})) && ! compgen -G "$run_dir/node-*/outcome.json" >/dev/null; }}
}}
leave() {{
  rm -f "$run_dir/secrets"
  exit "$code"
}}
if ((code == 0 || stopped)) || [[ ${{ENVIRONMENT:-}} != BATCH ]] || ! retry; then
  leave
fi
echo "$code: $(newest)" >>"$run_dir/attempts"
mapfile -t marks < <(cut -d: -f2- "$run_dir/attempts")
if ((${{#marks[@]}} > {requeues} + 1)); then
  say "not requeued: {requeues} requeues are all that this run may have"
  leave
fi
if ((${{#marks[@]}} >= {last} && $(printf '%s\\n' "${{marks[@]: -{last}}}" | sort -u | wc -l) == 1)); then
  code={exits.GAVE_UP:d}
  say "not requeued: {in_vain} starts in a row left no new checkpoint"
  leave
fi
latest=$(newest | cut -d" " -f2-)
say "requeued: the run goes on from ${{latest:-the beginning}}"
scontrol requeue "$SLURM_JOB_ID" || leave
exit "$code"
"""
