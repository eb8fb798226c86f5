-- fenced
-- Set the counts of what was appended to those of the learner, if it has read all: a worker may have written others.
-- KEYS: 1 state (hash), 2 experience (stream), 3 counts (hash).
-- A time of the first step that is not within the run's becomes that of the run's creation.
-- ARGV: 1 token, 2 last entry read, 3 fragments, 4 transitions up to it, 5 bytes of the stream. Answer: 1 if they differed.
local time, created = redis.call('TIME'), number(redis.call('HGET', KEYS[1], 'created_ms'))
if redis.call('HEXISTS', KEYS[3], 'first_step_ms') == 1 and created then
  local at = counts_of(KEYS[3], 'first_step_ms')[1] or 0
  if at < created or at > time[1] * 1000 + math.floor(time[2] / 1000) then
    redis.call('HSET', KEYS[3], 'first_step_ms', string.format('%.0f', created))
  end
end
if #redis.call('XRANGE', KEYS[2], '(' .. ARGV[2], '+', 'COUNT', 1) > 0 then return 0 end
local bytes = (number(redis.call('HGET', KEYS[1], 'trimmed_bytes')) or 0) + ARGV[5]
local counts = counts_of(KEYS[3], 'appended_fragments', 'appended_steps', 'appended_bytes')
if counts[1] == tonumber(ARGV[3]) and counts[2] == tonumber(ARGV[4]) and counts[3] == bytes then return 0 end
redis.call('HSET', KEYS[3], 'appended_fragments', ARGV[3], 'appended_steps', ARGV[4], 'appended_bytes', bytes)
return 1
