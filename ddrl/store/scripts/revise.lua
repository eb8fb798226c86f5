-- Change what a run's learner goes on with, unless another change was quicker; its learner begins anew from its checkpoint.
-- KEYS: 1 state (hash), 2 journal (stream), 3 weights to go back to (string).
-- ARGV: 1 rules of quarantine (JSON, "" for none) that were read, 2 the new ones, 3 the weights, "" for none,
--       4 cap of the journal, then fields and values of its entry. Answer: 1; 0 if the rules are others, or the run is gone.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if (redis.call('HGET', KEYS[1], 'quarantine') or '') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'quarantine', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'revision', 1)
if ARGV[3] ~= '' then redis.call('SET', KEYS[3], ARGV[3]) end
add_capped(KEYS[2], ARGV[4], unpack(ARGV, 5))
return 1
