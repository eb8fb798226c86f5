-- Change what a run's learner goes on with, unless another change was quicker; it begins anew from its checkpoint.
-- KEYS: 1 state (hash), 2 journal (stream), 3 weights to go back to (string).
-- ARGV: 1 revision that was read, 2 rules of quarantine (JSON, "" for none), 3 the weights, "" for none, 4 cap of the
--       journal, 5 random id of the change, then fields and values of its entry.
-- Answer: 1; 0 if the revision is another, or the run is gone. A repeated call changes nothing and answers 1.
local now = tonumber(redis.call('HGET', KEYS[1], 'revision') or 0)
if now == tonumber(ARGV[1]) + 1 and redis.call('HGET', KEYS[1], 'revision_id') == ARGV[5] then return 1 end
if now ~= tonumber(ARGV[1]) or redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'quarantine', ARGV[2], 'revision', now + 1, 'revision_id', ARGV[5])
if ARGV[3] ~= '' then redis.call('SET', KEYS[3], ARGV[3]) end
add_capped(KEYS[2], ARGV[4], unpack(ARGV, 6))
return 1
