-- Replace a run's config if nobody else has changed it since it was read.
-- KEYS: 1 spec (string), 2 state (hash), 3 journal (stream), 4 counts (hash).
-- ARGV: 1 config version that was read, 2 spec (JSON), 3 cap of the journal, 4 number of fields, then fields of the
--       state and values, then option, old and new value (JSON) of each change.
-- Answer: the new config version, or 0 if another change was quicker. A repeated call changes nothing.
local now = tonumber(redis.call('HGET', KEYS[2], 'config_version') or 0)
if now == tonumber(ARGV[1]) + 1 and redis.call('GET', KEYS[1]) == ARGV[2] then return now end
if now ~= tonumber(ARGV[1]) or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
local first = 5 + 2 * tonumber(ARGV[4])
local steps = string.format('%.0f', number(redis.call('HGET', KEYS[4], 'appended_steps')) or 0)
for i = 5, first - 1, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
for i = first, #ARGV, 3 do
  add_capped(KEYS[3], ARGV[3], 'event', 'set', 'option', ARGV[i], 'from', ARGV[i + 1],
    'to', ARGV[i + 2], 'env_steps', steps)
end
return redis.call('HINCRBY', KEYS[2], 'config_version', 1)
