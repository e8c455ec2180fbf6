set -u
cd benchmarks
nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active --format=csv,noheader -lms 250 > $OUT/smi.csv &
SMI=$!
export PYTHONPATH=../src PYTHONUNBUFFERED=1
date +%T
for v in old static drawn stages4 band5 nohalf; do python probe_ragged.py warm $v q > $OUT/warm_$v.txt 2>&1 & done
for v in old drawn stages4; do python probe_ragged.py warm $v d > $OUT/warm_d_$v.txt 2>&1 & done
for j in $(jobs -p); do [ $j != $SMI ] && wait $j; done
date +%T; tail -n 2 $OUT/warm_*.txt
timeout 100 python probe_ragged.py products old,static,drawn,stages4,band5,nohalf old,drawn,stages4 2>&1 | tee $OUT/products.txt
date +%T
timeout 80 python probe_ragged.py layers 2>&1 | tee $OUT/layers.txt
date +%T
kill $SMI
