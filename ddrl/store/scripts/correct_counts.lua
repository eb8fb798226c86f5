-- fenced
-- Set the counts of what was appended right: a worker may have written others. They are the learner's, if it has read
-- all; else they differ from the right ones as the append that wrote the last entry read differed from the learner. A
-- worker may have written that entry, too, so each count stays within what can be.
-- KEYS: 1 state (hash), 2 experience (stream), 3 counts (hash).
-- A time of the first step that is missing, or not within the run's, becomes that of the run's creation.
-- ARGV: 1 token, 2 last entry read, 3 fragments, 4 transitions up to it, 5 bytes of the stream up to it, 6 most
--       transitions that can have been appended; 7 to 9 what its append counted of fragments, transitions and bytes, if
--       that is known. Answer: 1 if they differed.
local function is_after(id, other)
  local ms, seq = string.match(id, '(%d+)-(%d+)')
  local other_ms, other_seq = string.match(other, '(%d+)-(%d+)')
  if ms ~= other_ms then return tonumber(ms) > tonumber(other_ms) end
  return tonumber(seq) > tonumber(other_seq)
end

write_when_full(KEYS[3])
local time, created = redis.call('TIME'), number(redis.call('HGET', KEYS[1], 'created_ms'))
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local is_played = tonumber(ARGV[4]) > 0 or redis.call('HEXISTS', KEYS[3], 'first_step_ms') == 1
if is_played and created then
  local at = counts_of(KEYS[3], 'first_step_ms')[1] or 0
  if at < created or at > now_ms then
    redis.call('HSET', KEYS[3], 'first_step_ms', string.format('%.0f', created))
  end
end
local bytes = (number(redis.call('HGET', KEYS[1], 'trimmed_bytes')) or 0) + ARGV[5]
local learned = {tonumber(ARGV[3]), tonumber(ARGV[4]), bytes}
local counts = counts_of(KEYS[3], 'appended_fragments', 'appended_steps', 'appended_bytes')
-- Appends keep the stream within its budget: more bytes than that are forged. More steps than can have been allowed
-- count as just as many, so that play waits.
local most_bytes = bytes + (tonumber(redis.call('HGET', KEYS[1], 'max_bytes')) or 0) + 2 ^ 30
local right, most = {unpack(learned)}, {2 ^ 53, math.max(tonumber(ARGV[6]), learned[2]), most_bytes}
if first_entry('XRANGE', KEYS[2], '(' .. ARGV[2], '+') then  -- the first that waits
  -- An append before the counts were last set tells nothing of the present ones.
  local set_at = redis.call('HGET', KEYS[1], 'counts_set_at')
  local is_known = #ARGV >= 9 and not (set_at and not is_after(ARGV[2], set_at))
  for i = 1, 3 do
    local count = (counts[i] or 0) + (is_known and learned[i] - ARGV[6 + i] or 0)
    if count > most[i] then count = i == 3 and learned[3] or most[i] end
    right[i] = math.max(count, learned[i])
  end
end
if counts[1] == right[1] and counts[2] == right[2] and counts[3] == right[3] then return 0 end
redis.call('HSET', KEYS[3], 'appended_fragments', right[1], 'appended_steps', right[2], 'appended_bytes', right[3])
redis.call('HSET', KEYS[1], 'counts_set_at', string.format('%.0f-%d', now_ms, 2 ^ 31))
return 1
