import sys, pathlib, tempfile, json, concurrent.futures, multiprocessing, os, importlib
def main():
  import jax
  jax.config.update("jax_platforms","cpu"); os.environ["JAX_PLATFORMS"]="cpu"
  from experiments import aot
  from configs.kernels.aot import get_config
  c=get_config()
  from specdec_jax.kernels import OPS
  for t in sys.argv[2].split(","):
    platform,target=c.targets[t]
    with tempfile.TemporaryDirectory() as root, concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), aot.prepare, (root,)) as pool:
      for job in sys.argv[1].split(","):
        print(t, job, pool.submit(aot.work, root, platform, target, tuple(job.split("/"))).result(), flush=True)
if __name__=="__main__": main()
