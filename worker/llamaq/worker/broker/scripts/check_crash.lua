-- Checks whether the last worker of a job died with the job. A worker calls this script after it has taken the job's
-- entry from another worker, and before it claims the job.
--
-- The death counts if all of these hold: the job is `at_risk` (requeue.lua deletes this field), another worker took the
-- entry, the last worker's heartbeat is old, and its attempt stored no token. Then `crashes` and `deaths` record it. A death
-- after a stored token is counted in the metrics alone.
-- After too many deaths the job ends here with the error `poison`. This cannot be undone, so the last death counts only if
-- the heartbeat is three times as old. Until then nothing changes. The check is repeated when the lease has expired that
-- this worker has given to the entry.
--
-- The job becomes 'queued' and is no longer at risk, so that a repeated call does not count the death again. The sign of
-- its `started_attempt` changes, because no worker has the job now. If its last worker is alive, this worker may still
-- write until the claim, but must not publish `started` again. Nothing changes if the result is 'stale' or 'unsure', or
-- if the job was cancelled: claim.lua ends a cancelled job.
--
-- A worker that is only paused or disconnected also counts as dead. When the worker continues, its first call for this
-- attempt returns 'lost' and removes the death (see `remove_death` in _lib.lua).
--
-- KEYS[1]   job             hash of the job
-- KEYS[2]   events          stream of the job's events
-- KEYS[3]   stream          job stream that the job was read from
-- KEYS[4]   dead            stream of dead letters
-- ARGV[1]   entry           id of the job's entry
-- ARGV[2]   group           consumer group of the job stream
-- ARGV[3]   channel         channel of the job's events
-- ARGV[4]   id              id of the job
-- ARGV[5]   worker          id of the worker that has taken the entry
-- ARGV[6]   last_worker     id of the worker that claimed the job last; '': the job is not at risk
-- ARGV[7]   silent_ms       age of the last worker's last heartbeat, in ms, by the clock of the server that has it
-- ARGV[8]   dead_after_ms   age of a heartbeat, in ms, from which its worker counts as dead
-- ARGV[9]   suspect_deaths  number of deaths that make the job a suspect; one more ends it
-- ARGV[10]  dead_ttl_ms     shortest life of a dead job's keys, in ms
-- ARGV[11]  max_dead        number of entries stored in the stream of dead letters
--
-- Returns 'ok'       the job may be claimed
--         'suspect'  the job may be prepared and run while no other job runs on the worker
--         'dead'     the job has ended here
--         'stale'    another worker has claimed the job meanwhile
--         'unsure'   one more death would end the job, and its last worker may be alive: it still has the job

local job, events, stream, dead = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local entry, group, channel, id, worker, last_worker, silent_ms, dead_after_ms, suspect_deaths, dead_ttl, max_dead =
  unpack(ARGV)
silent_ms, dead_after_ms, suspect_deaths = tonumber(silent_ms), tonumber(dead_after_ms), tonumber(suspect_deaths)

local status, own_entry, priority, cancel, attempt, holder, at_risk, generated, generated_at_start, started_attempt =
  unpack(redis.call('HMGET', job, 'status', 'entry', 'priority', 'cancel', 'attempt', 'worker', 'at_risk', 'generated',
    'generated_at_start', 'started_attempt'))
if not status or has_ended(status) or not is_entry_of_job(own_entry, priority, stream, entry) or cancel then
  return 'ok' -- claim.lua drops such an entry, or ends the job
end

local has_no_token = is_unproven(generated, generated_at_start)
if at_risk then
  if holder ~= last_worker then
    return 'stale'
  end
  local has_died = last_worker ~= worker and silent_ms >= dead_after_ms
  local is_last = has_no_token and #deaths_of(job) >= suspect_deaths
  if has_died and is_last and silent_ms < 3 * dead_after_ms then
    return 'unsure'
  end
  allow_writes_when_full(job)
  if has_died then
    record_crash(job, attempt, last_worker, has_no_token)
  end
  redis.call('HSET', job, 'status', 'queued')
  redis.call('HDEL', job, 'at_risk')
  if attempt and started_attempt == attempt then
    redis.call('HSET', job, 'started_attempt', '-' .. attempt)
  end
end
local deaths = deaths_of(job)
if not has_no_token or #deaths < suspect_deaths then
  return 'ok'
end
if #deaths == suspect_deaths then
  return 'suspect'
end

local workers = {}
for place, death in ipairs(deaths) do
  workers[place] = string.match(death, '=(.*)')
end
workers = table.concat(workers, ' ')
local reason = #deaths .. ' workers died with this job before they stored a token of it: ' .. workers
bury(job, events, channel, stream, group, entry, dead, id, 'poison', reason, workers, dead_ttl, max_dead)
return 'dead'
