-- Choose the run that a free process plays next: stride scheduling (Waldspurger and Weihl 1995, MIT/LCS/TM-528).
-- Of the runs that may be played here, those with steps left come first, then the higher priority, then the least
-- `virtual_ms`: process time divided by weight. The run is charged a whole segment at once, so that processes that
-- choose at the same time spread by weight; end_segment.lua returns what was not used.
-- A run that starts or comes back begins at the least of the other active runs: it has nothing to catch up.
-- KEYS: none, as a worker may only read the list of runs, and the keys of the runs are formed here.
-- ARGV: 1 key of the runs that have not ended (zset), 2 to 6 keys of a run with %s in its place: state (hash), lease
--       (string), playing (hash), draining (set) and counts (hash), 7 process, 8 node, 9 pid, 10 task, 11 ms that the
--       task may take, 12 number of queues that the process serves, then these queues, then the runs that it cannot play.
-- Answer: the run; '' if there is one, but for the task's time; else nil.
local LEVELS = {high = 1, normal = 2, low = 3}
local process, node, num_queues = ARGV[7], ARGV[8], tonumber(ARGV[12])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local serves, cannot_play = {}, {}
for i = 13, 12 + num_queues do serves[ARGV[i]] = true end
for i = 13 + num_queues, #ARGV do cannot_play[ARGV[i]] = true end

local function set_virtual(run, virtual)
  run.virtual = virtual
  redis.call('HSET', run.counts, 'virtual_ms', string.format('%.3f', virtual))
end

local runs, is_late, peers = {}, false, {}  -- peers: by priority, the runs that share process time
for _, name in ipairs(redis.call('ZRANGE', ARGV[1], 0, -1)) do
  local run = {name = name, counts = string.format(ARGV[6], name), playing = string.format(ARGV[4], name)}
  local f = redis.call('HMGET', string.format(ARGV[2], name), 'status', 'weight', 'priority', 'queue', 'allowance',
    'version', 'segment_ms', 'limit_ms', 'processes')
  local counts = counts_of(run.counts, 'appended_steps', 'virtual_ms', 'away_ms')
  run.weight, run.segment, run.virtual = tonumber(f[2] or 1), tonumber(f[7] or 5000), counts[2]
  run.level = LEVELS[f[3] or 'normal']
  local unended = redis.call('HGET', run.playing, process)
  if unended then  -- the reply to this very call, or to the end of a segment, was lost
    local noted = decode(unended) or {}
    redis.call('HDEL', run.playing, process)
    local charge_ms, weight = number(noted.charge_ms), number(noted.weight)
    if run.virtual and charge_ms and weight then set_virtual(run, run.virtual - charge_ms / weight) end
  end
  local is_open = f[1] == 'active' and tonumber(f[6] or -1) >= 0
    and redis.call('EXISTS', string.format(ARGV[3], name)) == 1
  run.wants = is_open and tonumber(f[5] or 0) > (counts[1] or 0)
  local away_ms = counts[3]
  if run.wants then
    run.is_new = not run.virtual or (away_ms and now_ms - away_ms > 2 * run.segment)
    if away_ms then redis.call('HSET', run.counts, 'away_ms', '') end
  elseif not is_open and away_ms ~= 0 then
    redis.call('HSET', run.counts, 'away_ms', 0)
  elseif is_open and not away_ms then
    redis.call('HSET', run.counts, 'away_ms', string.format('%.0f', now_ms))
  end
  if run.wants then
    local peer = peers[run.level] or {weight = 0, processes = 0, segment = 0, charge = 0}
    -- A worker may write any number of fields; no more processes play than serve the run's queue, twice where some left.
    run.num_playing = math.min(redis.call('HLEN', run.playing), 2 * tonumber(f[9] or math.huge))
    peer.weight, peer.processes = peer.weight + run.weight, peer.processes + run.num_playing
    peer.segment = math.max(peer.segment, run.segment)
    peer.charge = math.max(peer.charge, run.segment / run.weight)
    if not run.is_new then
      if not peer.least or run.virtual < peer.least then
        peer.least, peer.second, peer.first_run = run.virtual, peer.least, name
      elseif not peer.second or run.virtual < peer.second then
        peer.second = run.virtual
      end
    end
    peers[run.level] = peer
  end
  if is_open then runs[#runs + 1] = run end
  run.is_here = is_open and serves[f[4]] and not cannot_play[name]
    and redis.call('SISMEMBER', string.format(ARGV[5], name), node) == 0
  if run.is_here and tonumber(f[8] or 0) > tonumber(ARGV[11]) then
    run.is_here, is_late = false, true
  end
end

local function comes_before(one, other)
  if one.wants ~= other.wants then return one.wants end
  if one.level ~= other.level then return one.level < other.level end
  local one_virtual, other_virtual = one.virtual or 0, other.virtual or 0
  if one_virtual ~= other_virtual then return one_virtual < other_virtual end
  return (one.num_playing or 0) / one.weight < (other.num_playing or 0) / other.weight
end

local chosen
for _, run in ipairs(runs) do
  if run.wants then
    local peer = peers[run.level]
    local least = peer.least
    if peer.first_run == run.name then least = peer.second end
    local virtual = run.virtual or least or 0
    if least then
      -- Charges of segments that are played now make up for as much; a run that was not given its due, such as one that
      -- few workers can play, claims no more than that later.
      local credit = 2 * (peer.segment * peer.processes / peer.weight + peer.charge)
      virtual = math.min(math.max(virtual, run.is_new and least or least - credit), least + 2 * credit)
    end
    if virtual ~= run.virtual then set_virtual(run, virtual) end
  end
  if run.is_here and (not chosen or comes_before(run, chosen)) then chosen = run end
end
if not chosen then return is_late and '' or nil end
set_virtual(chosen, (chosen.virtual or 0) + chosen.segment / chosen.weight)
redis.call('HSET', chosen.playing, process, cjson.encode({node = node, pid = tonumber(ARGV[9]), task = ARGV[10],
  since_ms = now_ms, charge_ms = chosen.segment, weight = chosen.weight}))
return chosen.name
