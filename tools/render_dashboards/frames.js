// Queries of a panel -> data frames, as Grafana's Prometheus data source makes them.
import { FieldType } from '@grafana/data';

export const asked = new URLSearchParams(location.search);

export const filled = (text) => text
  .replaceAll('$__rate_interval', asked.get('rate') || '20s')
  .replace(/\$(job|model_name|instance|engine|pod|target)\b/g, (_, name) => asked.get(`var-${name}`) ?? '.*');

export async function ask(path, parameters) {
  const answer = await fetch(`${asked.get('prometheus')}/api/v1/${path}`, { method: 'POST', body: new URLSearchParams(parameters) });
  const body = await answer.json();
  if (body.status !== 'success') throw new Error(`${body.error} in ${parameters.query}`);
  return body.data.result;
}

export const stepOf = (from, to) => Math.max(1, Math.round((to - from) / 400));

export async function framesOf(panel, from, to) {
  const all = [];
  for (const target of panel.targets) {
    const expr = filled(target.expr);
    if (target.format === 'table') {
      all.push(tableFrame(await ask('query', { query: expr, time: to }), target.refId, panel.targets.length));
    } else if (target.instant) {
      for (const one of await ask('query', { query: expr, time: to })) all.push(seriesFrame([one.value], one.metric, target));
    } else {
      const step = stepOf(from, to);
      for (const one of await ask('query_range', { query: expr, start: from, end: to, step })) {
        all.push(seriesFrame(spaced(one.values, step, to), one.metric, target));
      }
    }
  }
  return all;
}

// A gap in the samples is a gap in the line, and so is their end.
function spaced(values, step, to) {
  const out = [];
  for (const [time, value] of [...values, [to + step]]) {
    if (out.length && time - out[out.length - 1][0] > 1.5 * step) out.push([out[out.length - 1][0] + step, null]);
    if (time <= to) out.push([time, value]);
  }
  return out;
}

const number = (text) => (text === null ? null : text === '+Inf' ? Infinity : Number(text));
const legend = (format, labels) => format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');

function seriesFrame(values, labels, target) {
  return {
    refId: target.refId, length: values.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: values.map(([time]) => time * 1000) },
      { name: 'Value', type: FieldType.number, labels, values: values.map(([, value]) => number(value)),
        config: { displayNameFromDS: target.legendFormat ? legend(target.legendFormat, labels) : undefined } },
    ],
  };
}

// No series: a frame without fields, as the data source gives it.
function tableFrame(series, refId, count) {
  if (!series.length) return { refId, length: 0, fields: [] };
  const names = [...new Set(series.flatMap((one) => Object.keys(one.metric)))].sort();
  return {
    refId, length: series.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: series.map((one) => one.value[0] * 1000) },
      ...names.map((name) => ({ name, type: FieldType.string, config: {}, values: series.map((one) => one.metric[name] ?? '') })),
      { name: count === 1 ? 'Value' : `Value #${refId}`, type: FieldType.number, config: {}, values: series.map((one) => number(one.value[1])) },
    ],
  };
}
