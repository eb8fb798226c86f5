-- Runs before every script, whose own KEYS and ARGV it leaves alone. Workers may write anything into some keys, also
-- without a script: what cannot be read there is as if it were missing.

-- The settings of cjson and of the garbage collector are the server's, and any script may change them: the defaults.
cjson.encode_number_precision(14)
cjson.encode_max_depth(1000)
cjson.decode_max_depth(1000)
cjson.encode_sparse_array(false, 2, 10)
cjson.encode_invalid_numbers(false)
cjson.decode_invalid_numbers(true)
collectgarbage('restart')
collectgarbage('setpause', 200)
collectgarbage('setstepmul', 200)

-- A number as integers are exact up to, else nil: not nan, nor inf.
local function number(value)
  local found = tonumber(value or nil)
  if found and math.abs(found) <= 2 ^ 53 then return found end
end

-- A caller's own bound, and at most another: whoever calls a script may give any.
local function bound(value, most)
  return math.min(number(value) or most, most)
end

-- The table of a JSON object or list, else nil: also of one that is longer than ddrl writes.
local function decode(value)
  if type(value) ~= 'string' or #value > 16384 then return end
  local is_json, found = pcall(cjson.decode, value)
  if is_json and type(found) == 'table' then return found end
end

-- Counts of a hash. One that is longer than a number is emptied, where the caller may: each look would copy it.
local function counts_of(key, ...)
  local found = redis.call('HMGET', key, ...)
  for i, field in ipairs({...}) do
    if found[i] and #found[i] > 64 then redis.pcall('HSET', key, field, '') end
    found[i] = number(found[i])
  end
  return found
end

-- Keep the largest allowance that a run has had: a learner that starts anew allows less for a while.
local function note_allowed(key, allowance)
  local most = tonumber(redis.call('HGET', key, 'most_allowed') or 0)
  redis.call('HSET', key, 'most_allowed', string.format('%.0f', math.max(most, tonumber(allowance))))
end

-- Let a script write at maxmemory: the server asks for memory at the first write only, and this one takes none.
local function write_when_full(key) redis.call('HDEL', key, '') end

-- Add to a count; one that a worker made so large that it would grow no more begins again.
local function increase(key, field, by)
  local sum = (number(redis.call('HGET', key, field)) or 0) + by
  redis.call('HSET', key, field, sum < 2 ^ 53 and sum or by)
end

-- Drop the older half of a stream as long as it has more than 128 MiB, or more than 16 MiB and a longer mean entry than
-- ddrl writes: 64 KiB for results of evaluations, else 16 KiB. One entry of a worker's may have millions of fields,
-- which take seconds each time they are looked at. Nothing happens where the caller may not do it.
local function shrink(key)
  local longest = string.find(key, '}:evaluations', 1, true) and 2 ^ 16 or 2 ^ 14
  repeat
    local bytes, length = redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', 0), redis.call('XLEN', key)
    if type(bytes) ~= 'number' or length == 0 then return end
    if bytes <= math.max(2 ^ 24, math.min(2 ^ 27, longest * length)) then return end
  until type(redis.pcall('XTRIM', key, 'MAXLEN', math.floor(length / 2))) ~= 'number'
end

-- XADD; nil if the stream has no ids left, until lower_ids.lua.
local function add(...)
  local id = redis.pcall('XADD', ...)
  if type(id) == 'string' then return id end
  if not string.find(id.err, 'exhausted') then return redis.call('XADD', ...) end
end

-- The same with a cap, which holds again after one call, however many entries there are.
local function add_capped(key, length, ...)
  return add(key, 'MAXLEN', '~', length, 'LIMIT', 0, '*', ...)
end

local MOST_PARTS = 200  -- fields and values of an entry: an append writes fewer

-- The first entry of XRANGE or XREVRANGE, and how many parts it looked at; nil if there is none. One of more than
-- MOST_PARTS is deleted: to look at millions takes longer than callers wait, who would ask again for ever. Of many such
-- the last that a call has time for stands, without its parts, for those to come.
local function first_entry(command, key, from, to)
  local parts = 0
  repeat
    local entry = redis.call(command, key, from, to, 'COUNT', 1)[1]
    parts = parts + 1 + (entry and #entry[2] or 0)
    if not entry or #entry[2] <= MOST_PARTS then return entry, parts end
    local is_deleted = type(redis.pcall('XDEL', key, entry[1])) == 'number'
    if parts > 300000 then return {entry[1], {}}, parts end
  until not is_deleted
end

-- The id of the next entry of a stream; nil, and perhaps the reason, if it takes none. XINFO would look at entries,
-- which may be large.
local function next_id(key)
  local id = redis.pcall('XADD', key, 'NOMKSTREAM', '*', 'x', '')
  if type(id) ~= 'string' then return nil, id and id.err end
  redis.call('XDEL', key, id)
  return id
end

-- The newest entries of a stream from one id to another, the newest first, and the id of the newest, '' if there is none.
-- It looks at `most_parts` fields and values at most; entries have `most_bytes` together. An entry of more than
-- `longest` bytes is left out, one of more than MOST_PARTS also deleted.
local function newest(key, from, to, most_parts, most_bytes, longest)
  local found, parts, bytes, last = {}, 0, 0, ''
  repeat
    local page = redis.call('XREVRANGE', key, to, from, 'COUNT', 20)
    for _, entry in ipairs(page) do
      local num, size = #entry[2], 0
      if last == '' then last = entry[1] end
      parts, to = parts + num + 1, '(' .. entry[1]
      if num > MOST_PARTS then redis.pcall('XDEL', key, entry[1]) end
      if parts > most_parts then return found, last end
      for i = 1, math.min(num, MOST_PARTS) do size = size + #entry[2][i] end
      if num <= MOST_PARTS and size <= longest then
        bytes = bytes + size
        if bytes > most_bytes then return found, last end
        found[#found + 1] = entry
      end
    end
  until #page == 0
  return found, last
end
