-- Cancels waiting jobs with `cancel_on_disconnect` that have had no subscriber for some time, so that they do not take a
-- slot. The worker of a job that has a slot, or was preempted, checks its subscribers itself (flush.lua).
--
-- All workers of a queue call this script. The first check of a job without a subscriber begins the time without
-- subscribers. A check that is late begins this time again: Redis or all workers were away meanwhile, and the
-- subscribers may not have come back yet. So does a check that was planned before the clock was set back: its time is
-- further ahead than this script plans a check.
--
-- The keys of the jobs are not in KEYS: they follow from the ids. All of them have the hash tag of the partition.
--
-- KEYS[1]  watched        sorted set of the ids of jobs with `cancel_on_disconnect`, by the time of their next check
-- KEYS[2]  interactive    job stream of priority 'interactive'
-- KEYS[3]  bulk           job stream of priority 'bulk'
-- ARGV[1]  group          consumer group of the job streams
-- ARGV[2]  disconnect_ms  time without subscribers after which a job is cancelled, in ms
-- ARGV[3]  max_late_ms    how late a check may be without such a new beginning, in ms
-- ARGV[4]  count          number of jobs to check at most
--
-- Returns the number of jobs that were due for a check.

local watched, interactive, bulk = KEYS[1], KEYS[2], KEYS[3]
local group, disconnect_ms, max_late_ms, count, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], now_ms()
local partition = string.match(watched, '^(.*:)watched$')
local CHECK_MS, READ_CHECK_MS = 1000, 4000 -- time until the next check: without a subscriber, and with one

-- Checks a job. Returns the time until its next check in ms; nil: it needs none.
local function check(id, due_ms)
  local job = partition .. 'job:' .. id
  local status, priority, entry, attempt, started_attempt, alone_ms = unpack(redis.call('HMGET', job,
    'status', 'priority', 'entry', 'attempt', 'started_attempt', 'alone_ms'))
  if not is_open(status) then
    return nil
  end
  local is_waiting = entry and not has_run_in_worker(status, attempt, started_attempt)
  if not is_waiting or redis.call('PUBSUB', 'NUMSUB', partition .. 'tokens:' .. id)[2] > 0 then
    if alone_ms then
      redis.call('HDEL', job, 'alone_ms')
    end
    return READ_CHECK_MS
  end
  local is_in_time = due_ms <= now and now - due_ms <= max_late_ms
  local alone_since_ms = is_in_time and whole_number(alone_ms)
  if not alone_since_ms then
    redis.call('HSET', job, 'alone_ms', now)
  elseif now - alone_since_ms >= disconnect_ms then
    end_cancelled(job, priority == 'bulk' and bulk or interactive, group, entry)
    return nil
  end
  return CHECK_MS
end

local due = redis.call('ZRANGEBYSCORE', watched, '-inf', now, 'WITHSCORES', 'LIMIT', 0, count)
local latest = now + 2 * READ_CHECK_MS
local n_left = count - #due / 2
for _, value in ipairs(redis.call('ZRANGEBYSCORE', watched, '(' .. latest, '+inf', 'WITHSCORES', 'LIMIT', 0, n_left)) do
  due[#due + 1] = value
end
if #due > 0 then
  allow_writes_when_full(watched) -- jobs that end free memory
end
for place = 1, #due, 2 do
  local id, due_ms = due[place], tonumber(due[place + 1])
  local next_ms = for_one_job(check, id, due_ms)
  if next_ms then
    redis.call('ZADD', watched, now + (tonumber(next_ms) or CHECK_MS), id) -- not a number: the job is damaged
  else
    redis.call('ZREM', watched, id)
  end
end
return #due / 2
